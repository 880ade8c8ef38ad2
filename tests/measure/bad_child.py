"""A child that misbehaves on request; run as a module by the tests."""

import ctypes
import os
import subprocess
import sys
import time

from fitune.measure.wire import ChildPort


def main() -> None:
    port = ChildPort()
    while (request := port.receive()) is not None:
        op = request.get("op") or request.get("tactic", "").rpartition("/w")[2][:1]
        if op == "echo":
            port.send({"kind": "done", "value": request["value"]})
        elif op == "print":
            print("noise on stdout")
            port.send({"kind": "done", "value": None})
        elif op == "flood":
            sys.stderr.write("x" * (1 << 20) + "\nlast words\n")
            port.send({"kind": "done", "value": None})
        elif op == "hang":
            sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            port.send({"kind": "running", "pid": sleeper.pid})
            time.sleep(600)
        elif op == "segfault":
            sys.stderr.write("about to die\n")
            sys.stderr.flush()
            ctypes.string_at(0)
        elif op == "exit":
            os._exit(7)
        elif op == "4":  # a compile job with four warps: fine
            port.send(
                {"kind": "done", "status": "ok", "error": "", "shared_bytes": 1, "binary": "b", "pid": os.getpid()}
            )
        elif op == "8":  # with eight: the compiler aborts
            os.abort()
        elif op == "2":  # with two: it never ends
            time.sleep(600)
        elif op == "1":  # with one: it asks for too much
            port.send({"kind": "done", "status": "ok", "error": "", "shared_bytes": 1 << 30, "binary": "b"})


if __name__ == "__main__":
    main()
