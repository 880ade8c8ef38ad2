"""The GPU that is measured: what legality needs to know of it, the software around it, its clocks and power."""

from __future__ import annotations

import csv
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from fitune.target import KNOWN_TARGETS, Environment, Target, kernel_source_hash, version_of

CLOCK_PERIOD_S: Final = 0.05
SMI_PERIOD_S: Final = 5.0
INTERPRETER_SMS: Final = 4
_SMI_FIELDS: Final = "clocks.sm,power.draw,power.limit,driver_version"


def device_target(device: str) -> Target:
    """The chip behind a torch device. On `cpu`, where kernels are interpreted, the sm_90 that they are written for."""
    if not device.startswith("cuda"):
        return replace(KNOWN_TARGETS["sm_90"], device="Triton interpreter", num_sms=INTERPRETER_SMS)
    properties = torch.cuda.get_device_properties(device)
    name = properties.name
    if torch.version.hip:
        arch = properties.gcnArchName.split(":")[0]
    else:
        arch = f"sm_{properties.major}{properties.minor}"
    known = KNOWN_TARGETS.get(arch)
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or getattr(
        properties, "shared_memory_per_block", known.shared_bytes if known else 49_152
    )
    return Target(
        arch,
        name,
        properties.multi_processor_count,
        int(shared),
        int(properties.L2_cache_size),
        int(getattr(properties, "regs_per_multiprocessor", 65_536)),
        int(getattr(properties, "warp_size", 32)),
    )


def device_environment(target: Target, gauge: Gauge) -> Environment:
    """Versions around `target` in this process."""
    return Environment(
        device=target.device,
        arch=target.arch,
        num_sms=target.num_sms,
        fitune=version_of("fitune"),
        kernels=kernel_source_hash(),
        triton=version_of("triton"),
        torch=str(torch.__version__),
        driver=gauge.driver,
        cuda=str(torch.version.cuda or torch.version.hip or ""),
        python=platform.python_version(),
        optuna=version_of("optuna"),
        power_cap_w=gauge.power_cap_w,
    )


@dataclass(frozen=True, slots=True)
class Reading:
    """SM clock in MHz and board power in W; 0 when unknown."""

    sm_mhz: float = 0.0
    power_w: float = 0.0


class Gauge:
    """Reads clocks and power through NVML where its Python binding is there, else nvidia-smi, else not at all.

    A reading younger than the period is given out again, so that asking after every candidate costs little.
    """

    def __init__(self, device: str) -> None:
        self.driver = ""
        self.power_cap_w = 0.0
        self._nvml: Any = None
        self._handle: Any = None
        self._uuid = ""
        self._last = Reading()
        self._last_s = float("-inf")
        self._period_s = CLOCK_PERIOD_S
        if not device.startswith("cuda") or torch.version.hip:
            return
        uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
        self._uuid = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        if not self._open_nvml():
            self._period_s = SMI_PERIOD_S
            self._read_smi()

    def read(self) -> Reading:
        """Clock and power now, or at most one period ago."""
        now_s = time.monotonic()
        if self._uuid and now_s - self._last_s >= self._period_s:
            self._last_s = now_s
            self._last = self._read_nvml() if self._nvml is not None else self._read_smi()
        return self._last

    def _open_nvml(self) -> bool:
        try:
            import pynvml
        except ImportError:
            return False
        try:
            pynvml.nvmlInit()
            self._handle = self._find(pynvml)
        except pynvml.NVMLError:
            return False
        if self._handle is None:
            return False
        self._nvml = pynvml
        self.driver = _text(self._ask(pynvml.nvmlSystemGetDriverVersion, ""))
        self.power_cap_w = self._ask(lambda: pynvml.nvmlDeviceGetPowerManagementLimit(self._handle), 0) / 1000.0
        return True

    def _find(self, nvml: Any) -> Any:
        try:
            return nvml.nvmlDeviceGetHandleByUUID(self._uuid)
        except nvml.NVMLError:
            return nvml.nvmlDeviceGetHandleByIndex(0) if nvml.nvmlDeviceGetCount() == 1 else None

    def _ask(self, question: Callable[[], Any], otherwise: Any) -> Any:
        """NVML's answer, or `otherwise` where this board or driver does not say."""
        try:
            return question()
        except self._nvml.NVMLError:
            return otherwise

    def _read_nvml(self) -> Reading:
        nvml, handle = self._nvml, self._handle
        mhz = self._ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM), 0)
        milliwatts = self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle), 0)
        return Reading(float(mhz), milliwatts / 1000.0)

    def _read_smi(self) -> Reading:
        tool = shutil.which("nvidia-smi")
        if tool is None:
            self._uuid = ""
            return Reading()
        command = [tool, f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader,nounits", f"--id={self._uuid}"]
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            self._uuid = ""
            return Reading()
        row = [cell.strip() for cell in next(csv.reader([text.strip()]))]
        if len(row) != 4:
            return Reading()
        self.driver = row[3]
        self.power_cap_w = _number(row[2])
        return Reading(_number(row[0]), _number(row[1]))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
