"""Targets, environments and the hash of the device code."""

from dataclasses import replace

import pytest

from fitune.errors import InputError
from fitune.target import KNOWN_TARGETS, Environment, kernel_source_hash, target_named, version_of


def test_known_targets_are_filed_under_their_arch() -> None:
    for name, target in KNOWN_TARGETS.items():
        assert target_named(name) is target
        assert target.arch == name
        assert target.num_sms > 0
        assert target.shared_bytes > 0


def test_an_unknown_target_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"'sm_91'.*sm_90"):
        target_named("sm_91")


def test_what_a_chip_can_do() -> None:
    hopper, ampere, blackwell, amd = (KNOWN_TARGETS[name] for name in ("sm_90", "sm_80", "sm_100", "gfx942"))
    assert hopper.has_tma
    assert hopper.has_wgmma
    assert not ampere.has_tma
    assert blackwell.has_tma
    assert not blackwell.has_wgmma
    assert not amd.is_cuda
    assert amd.capability == 0
    assert not amd.has_tma
    assert hopper.shared_bytes == 227 * 1024


def test_an_environment_is_named_by_all_its_fields() -> None:
    base = Environment("NVIDIA H200", "sm_90", 132, "0.1.0", "abc", triton="3.6.0", power_cap_w=700.0)
    assert Environment("NVIDIA H200", "sm_90", 132, "0.1.0", "abc", triton="3.6.0", power_cap_w=700.0).id == base.id
    others = [
        replace(base, device="NVIDIA H20"),
        replace(base, arch="sm_100"),
        replace(base, num_sms=78),
        replace(base, fitune="0.2.0"),
        replace(base, kernels="abd"),
        replace(base, triton="3.7.1"),
        replace(base, torch="3.6.0"),
        replace(base, driver="1"),
        replace(base, cuda="13.0"),
        replace(base, python="3.11"),
        replace(base, optuna="5.0"),
        replace(base, power_cap_w=650.0),
    ]
    assert len({base.id, *(other.id for other in others)}) == len(others) + 1


def test_versions_come_without_importing() -> None:
    assert version_of("numpy")
    assert version_of("no-such-package-of-ours") == ""


def test_the_kernel_hash_is_stable_and_short() -> None:
    first = kernel_source_hash()
    assert first == kernel_source_hash()
    assert len(first) == 16
    int(first, 16)
