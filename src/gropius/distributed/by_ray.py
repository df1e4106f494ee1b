"""A cluster by Ray: keepers are its actors, placement groups their places. Ray is imported here alone, when it is used.

Every call to Ray is a keeper's method with plain values; models, responses and episodes never pass through it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gropius.distributed.keeper import Keeper
from gropius.distributed.parts import Gone, Need, Post
from gropius.errors import RunHalted, UsageError

CONNECT_S = 10.0
STORE_BYTES = 80 << 20  # of Ray's own object store, in which this program keeps nothing
SHORT = "/tmp" if os.path.isdir("/tmp") else None  # names of sockets may have 107 bytes
LOCAL_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's switch for "this machine alone": it binds to 127.0.0.1
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class RayKeeper(Keeper):
    """A keeper that lives in an actor of Ray."""

    def address(self) -> str:
        """As Ray knows this machine."""
        import ray

        of_ray: Any = ray.util
        return str(of_ray.get_node_ip_address())


class RayPost:
    """A keeper's actor. group: its placement group; None for one that stands alone."""

    def __init__(self, actor: Any, group: Any = None) -> None:
        self.actor, self.group = actor, group

    def ask(self, method: str, *arguments: Any) -> Any:
        """See `Post.ask`."""
        return getattr(self.actor, method).remote(*arguments)


class RayCluster:
    """Ray as it is connected to in this process. lease_s: of its keepers."""

    def __init__(self, lease_s: float) -> None:
        import ray

        self._lease_s = lease_s
        self._ray: Any = ray

    def place(self, needs: Sequence[Need], spread: bool) -> list[Post]:
        """See `Cluster.place`."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        kind = self._ray.remote(RayKeeper)
        common: list[dict[str, Any]] = [
            {"num_cpus": need.cpus, "num_gpus": need.gpus, "max_restarts": 0} for need in needs
        ]
        if spread:  # a group of one would be put anywhere, and a lost one of several takes its group along
            return [RayPost(kind.options(**one, scheduling_strategy="SPREAD").remote(self._lease_s)) for one in common]
        bundles = [{"CPU": need.cpus, **({"GPU": need.gpus} if need.gpus else {})} for need in needs]
        group = placement_group(bundles, strategy="PACK")
        at = [PlacementGroupSchedulingStrategy(group, number) for number in range(len(needs))]
        return [
            RayPost(kind.options(**one, scheduling_strategy=where).remote(self._lease_s), group)
            for one, where in zip(common, at, strict=True)
        ]

    def answers(self, tokens: Sequence[Any], wait_s: float) -> dict[Any, Any]:
        """See `Cluster.answers`."""
        ready, _ = self._ray.wait(list(tokens), num_returns=len(tokens), timeout=wait_s) if tokens else ([], [])
        return {token: self._answer(token) for token in ready}

    def _answer(self, token: Any) -> Any:
        try:
            return self._ray.get(token)
        except self._ray.exceptions.RayActorError as error:
            return Gone(_reason(error))
        except self._ray.exceptions.RayError as error:
            return Gone(str(error).strip().splitlines()[-1][:200])

    def release(self, posts: Sequence[Post]) -> None:
        """See `Cluster.release`."""
        from ray.util.placement_group import remove_placement_group

        for post in posts:
            assert isinstance(post, RayPost)
            self._ray.kill(post.actor, no_restart=True)
        groups = {id(post.group): post.group for post in posts if isinstance(post, RayPost)}
        for group in groups.values():
            if group is not None:
                remove_placement_group(group)

    def describe(self) -> str:
        """What the machines have, and what of it is free."""
        everything, free = self._ray.cluster_resources(), self._ray.available_resources()
        parts = [f"{free.get(kind, 0):g} of {everything.get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU")]
        machines = sum(1 for node in self._ray.nodes() if node["Alive"])
        return f"Ray has {machines} machines with {' and '.join(parts)} free"

    def total(self, kind: str) -> float:
        """How much of a resource all machines have."""
        return float(self._ray.cluster_resources().get(kind, 0))


def _reason(error: Exception) -> str:
    """What Ray says of an actor that is gone, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("The actor ") and "died" in line] or lines
    return f"its keeper in Ray is gone ({told[0][:200]})" if told else "its keeper in Ray is gone"


@contextlib.contextmanager
def connected(address: str, lease_s: float, cpus: float) -> Iterator[RayCluster]:
    """Ray at an address (`ray://HOST:PORT`, or HOST:PORT of its GCS), or one of this run alone ("local", so many CPUs).

    Errors: UsageError where Ray is not installed or not there.
    """
    local = address == "local"
    if local:
        os.environ.update(LOCAL_ENVIRONMENT)
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    else:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise UsageError("--cluster needs Ray; install it with: pip install 'gropius[ray]'") from error
    quiet: Mapping[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    with tempfile.TemporaryDirectory(prefix="gr-", dir=SHORT, ignore_cleanup_errors=True) as scratch:
        try:
            if local:
                ray.init(
                    num_cpus=max(1, int(-(-cpus // 1))),
                    object_store_memory=STORE_BYTES,
                    include_dashboard=False,
                    _temp_dir=scratch,
                    **quiet,
                )
            else:
                _reach(address)
                ray.init(address, **quiet)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise UsageError(
                f"--cluster {address}: no Ray answers there: {str(error).splitlines()[0][:200]}"
            ) from error
        try:
            yield RayCluster(lease_s)
        except (ConnectionError, ray.exceptions.RayError) as error:
            raise RunHalted(f"Ray was lost: {str(error).strip().splitlines()[0][:200]}. Resume the run") from error
        finally:
            ray.shutdown()


def _reach(address: str) -> None:
    """Raises OSError where nobody listens: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), CONNECT_S).close()
