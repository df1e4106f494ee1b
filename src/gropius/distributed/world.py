"""The ranks of one run as this process sees them: who I am, how many there are, and how bytes get to all of them.

Numbers of the model travel by the device's own means (nccl between GPUs, gloo between CPUs); everything else is
`wire` frames over gloo.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import socket
import struct
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gropius.distributed.seat import Seat
from gropius.errors import RecipeError

SIOCGIFADDR = 0x8915
WAIT_S = 20.0  # one look for the next call; a rank that is gone is noticed by whoever started it


class World:
    """The process group. Every method but `lead` and `next_call` is called by all ranks together.

    deadline_s: for one exchange; whoever is missing by then is named. device: of this rank's part of the model. bind:
    the address of this machine that everything listens on.
    """

    def __init__(self, where: Seat, device: torch.device, deadline_s: float, bind: str = "127.0.0.1") -> None:
        self.rank, self.size, self.device, self.deadline_s = where.rank, where.size, device, deadline_s
        patience = datetime.timedelta(seconds=deadline_s)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if name := interface_of(bind):
                os.environ.setdefault(variable, name)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's agent holds the store
            dist.init_process_group(backend, timeout=patience)
        else:
            store = _store(where, patience)
            dist.init_process_group(backend, store=store, rank=where.rank, world_size=where.size, timeout=patience)
        self.mesh: DeviceMesh = init_device_mesh(device.type, (self.size,))
        self._control = dist.new_group(backend="gloo", timeout=patience)
        self._store = dist.distributed_c10d._get_default_store()
        self._calls = 0

    def call(self, patience_s: float = 0.0) -> None:
        """Rank 0: tell the others that something is to be done together; they wait for it in `await_call`.

        patience_s: until they are there; 0: the deadline. Errors: RuntimeError, one that `launch.lost_sight` knows,
        naming the ranks that are gone or do not come by then.
        """
        self._calls += 1
        self._store.set(f"gropius/call/{self._calls}", "1")
        self._store.delete_key(f"gropius/call/{self._calls - 1}")
        self._meet(patience_s or self.deadline_s)

    def await_call(self) -> None:
        """The other ranks: wait, however long it takes, until rank 0 calls."""
        self._calls += 1
        while True:
            try:
                self._store.wait([f"gropius/call/{self._calls}"], datetime.timedelta(seconds=WAIT_S))
                break
            except dist.DistStoreError:  # nothing yet
                continue
        self._meet(self.deadline_s)

    def _meet(self, patience_s: float) -> None:
        try:
            dist.monitored_barrier(self._control, datetime.timedelta(seconds=patience_s), wait_all_ranks=self.rank == 0)
        except RuntimeError as error:
            raise RuntimeError(
                f"the trainer ranks do not meet (cluster.deadline_s = {self.deadline_s:g} s): "
                f"{str(error).splitlines()[0]}"
            ) from error

    def broadcast(self, frame: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank."""
        size = torch.tensor([len(frame or b"")], dtype=torch.int64)
        dist.broadcast(size, 0, self._control)
        data = torch.frombuffer(bytearray(frame or b"") or bytearray(1), dtype=torch.uint8)
        if self.rank:
            data = torch.empty(max(1, int(size)), dtype=torch.uint8)
        dist.broadcast(data, 0, self._control)
        return data.numpy().tobytes()[: int(size)]

    def gather(self, frame: bytes) -> list[bytes]:
        """Every rank's bytes, on rank 0; an empty list on the others."""
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(frame)], dtype=torch.int64), self._control)
        longest = max(1, *(int(length) for length in lengths))
        data = torch.zeros(longest, dtype=torch.uint8)
        data[: len(frame)] = torch.frombuffer(bytearray(frame) or bytearray(1), dtype=torch.uint8)[: len(frame)]
        into = [torch.empty_like(data) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(data, into, 0, self._control)
        return [part.numpy().tobytes()[: int(n)] for part, n in zip(into or [], lengths, strict=False)]

    def any(self, mine: bool) -> bool:
        """True on every rank when it is on one of them."""
        flag = torch.tensor([int(mine)], dtype=torch.int64)
        dist.all_reduce(flag, dist.ReduceOp.MAX, self._control)
        return bool(flag)

    def spread(self, tensors: Sequence[Tensor]) -> None:
        """Rank 0's values into everybody's tensors of the same shapes, in place."""
        with torch.no_grad():
            for tensor in tensors:
                dist.broadcast(tensor.data, 0)

    def close(self) -> None:
        """Leave. Never waits for anyone."""
        dist.destroy_process_group()


def _store(where: Seat, patience: datetime.timedelta) -> TCPStore:
    """The store that the ranks meet at. Rank 0 holds it, on MASTER_ADDR alone: left to itself it listens everywhere."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if where.rank:
        return TCPStore(address, port, where.size, False, patience)
    listening = socket.create_server((address, port))
    return TCPStore(
        address, port, where.size, True, patience, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def interface_of(address: str) -> str:
    """The network interface that has an IPv4 address; "" where none is found (Linux only)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return ""


def device_of(wanted: str, where: Seat) -> torch.device:
    """The device of a rank: its own GPU where there are GPUs and the recipe does not say otherwise.

    Errors: RecipeError when a machine has more ranks than GPUs.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if wanted not in ("auto", "cuda"):
        raise RecipeError(
            f'model.device = "{wanted}" names one device and cluster.trainer_ranks asks for {where.size}; write "cuda"'
        )
    if where.local >= torch.cuda.device_count():
        raise RecipeError(
            f"rank {where.rank} is number {where.local} on its machine, which has {torch.cuda.device_count()} GPUs; "
            "start one rank a GPU"
        )
    return torch.device("cuda", where.local)
