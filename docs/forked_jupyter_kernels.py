"""Kernels for the pages of this site, forked from one process that has imported PyTorch and lazyviz.

Each page has a kernel of its own; importing PyTorch, Dynamo and lazyviz anew in each takes several seconds.

:func:`start` starts the server, and has Jupyter use it for the kernel ``python3``.  Jupyter starts a kernel
as ``python forked_jupyter_kernels.py ADDRESS -f CONNECTION_FILE``: a client that has the server fork, passes
on its own output files, and ends with the kernel.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

IMPORTS = ("torch", "torch._dynamo", "lazyviz", "ipykernel.kernelapp")
SIZE = 1 << 20  # bytes of a request, at most
PR_SET_PDEATHSIG = 1  # of Linux's prctl


def start() -> None:
    """Start the server; without fork, kernels are started as always."""
    if not sys.platform.startswith("linux"):
        return
    folder = tempfile.TemporaryDirectory()
    address = os.path.join(folder.name, "socket")
    spec = Path(folder.name, "kernels", "python3")
    spec.mkdir(parents=True)
    command = [sys.executable, __file__, address]
    spec.joinpath("kernel.json").write_text(
        json.dumps(
            {
                "argv": [*command, "-f", "{connection_file}"],
                "display_name": "Python 3 (ipykernel)",
                "language": "python",
            }
        )
    )
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdin is not None and server.stdout is not None
    if not server.stdout.readline():
        raise RuntimeError("the server of kernels did not start")
    os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, (folder.name, os.environ.get("JUPYTER_PATH"))))

    def end() -> None:
        server.stdin.close()  # which ends it
        server.wait(60)
        folder.cleanup()

    atexit.register(end)


def serve(address: str) -> list[str] | None:
    """Fork a kernel for each client until stdin is closed; returns its arguments in a kernel only."""
    for name in IMPORTS:
        __import__(name)
    gc.collect()
    gc.freeze()  # or each kernel would copy and traverse all of PyTorch's objects
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        while True:
            is_over = sys.stdin in select.select([sys.stdin, listener], [], [])[0]
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if is_over:
                return None
            client, _ = listener.accept()
            content, ancillary, _, _ = client.recvmsg(SIZE, socket.CMSG_SPACE(2 * 4))
            files = array.array("i", ancillary[0][2])
            if os.fork() == 0:
                break
            for file in (*files, client.detach()):
                os.close(file)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    request = json.loads(content)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for target, file in zip((1, 2), files, strict=True):
        os.dup2(file, target)
        os.close(file)
    client.sendall(str(os.getpid()).encode())
    client.detach()  # the kernel keeps it open: the client ends when the kernel ends
    os.environ.clear()
    os.environ.update(request["env"])
    os.environ.pop("JPY_PARENT_PID", None)  # its parent is the server
    os.chdir(request["cwd"])
    # Without a parent, it would print how to end it; its TCP port, of which it warns, is a local one.
    parent = f"--IPKernelApp.parent_handle={os.getppid()}"
    return [*request["argv"], parent, "--IPKernelApp.log_level=ERROR"]


def ask(address: str, arguments: list[str]) -> None:
    """Have the server fork a kernel, and wait until it has ended; signals are passed on to it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(address)
        content = json.dumps({"argv": arguments, "env": dict(os.environ), "cwd": os.getcwd()}).encode()
        files = array.array("i", (1, 2))
        server.sendmsg([content], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
        kernel = int(server.recv(64))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.kill(kernel, number))
        while server.recv(64):
            pass


if __name__ == "__main__":
    address, *arguments = sys.argv[1:]
    if arguments:
        ask(address, arguments)
    elif (argv := serve(address)) is not None:
        from ipykernel.kernelapp import launch_new_instance

        launch_new_instance(argv=argv)
