"""A Ray cluster of several nodes on this machine, all on 127.0.0.1, for the tests of the fleet."""

import contextlib
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path

from lab import Lab

LOCAL = {
    # Named for other systems, but it is the switch that keeps Ray on 127.0.0.1.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A lost head or node is noticed after seconds, not after minutes.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "RAY_grpc_client_keepalive_time_ms": "2000",
    "RAY_grpc_client_keepalive_timeout_ms": "4000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
# In place of torch, which takes seconds to import. FAKE_DEVICE is the name of a node's GPU.
TORCH = """
import os

__version__ = os.environ.get("FAKE_TORCH", "2")

class cuda:
    is_available = staticmethod(lambda: "FAKE_DEVICE" in os.environ)
    get_device_name = staticmethod(lambda: os.environ["FAKE_DEVICE"])

class backends:
    mps = None
"""
MARK = "CLUSTER_OF_A_TEST"  # a variable of all processes of its nodes
MEMORY = 80 * 2**20  # bytes of a node's object store: Ray's least


class RayCluster:
    """Starts and ends nodes. Each has one CPU, a cache of its own, and the stand-in for torch."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.temporary = tempfile.mkdtemp(prefix="ray-")  # short: paths of sockets are limited
        os.environ.update(LOCAL | {"RAY_TMPDIR": self.temporary})
        (folder / "torch").mkdir(parents=True, exist_ok=True)
        (folder / "torch" / "__init__.py").write_text(TORCH)
        self.names = 0
        self.cluster = None
        self.start_head()

    def start_head(self, port: int | None = None) -> None:
        """Start a head without room for runs; on this port if there was another one before."""
        from ray.cluster_utils import Cluster

        options = {"num_cpus": 0, "object_store_memory": MEMORY, "include_dashboard": False}
        if port:
            options["gcs_server_port"] = port
        self.cluster = Cluster(initialize_head=True, head_node_args=options)

    @property
    def address(self) -> str:
        """What RAY_ADDRESS has to be."""
        return self.cluster.address

    def add_node(self, cpus: int = 1, **environment: str):
        """Start a node; the environment is that of its workers."""
        self.names += 1
        cache = self.folder / f"cache{self.names}"
        variables = {"AUTORESEARCH_CACHE": str(cache), "PYTHONPATH": str(self.folder)}
        variables[MARK] = str(self.folder)
        return self.cluster.add_node(
            num_cpus=cpus, object_store_memory=MEMORY, env_vars=variables | environment
        )

    def processes(self, words: str) -> list[int]:
        """Numbers of the processes of its nodes whose command line holds these words."""
        ours = f"{MARK}={self.folder}".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                if words.encode() in line and ours in (process / "environ").read_bytes():
                    found.append(int(process.name))
        return sorted(found)

    def lose(self, node) -> None:
        """End a node without any grace, as a power cut does."""
        self.cluster.remove_node(node, allow_graceful=False)

    def variables(self, **more: str) -> dict[str, str]:
        """The environment of a command that uses this cluster."""
        return LOCAL | {"RAY_ADDRESS": self.address, "RAY_TMPDIR": self.temporary} | more

    def stop(self) -> None:
        """End everything."""
        with contextlib.suppress(Exception):  # what a test has killed cannot be ended again
            self.cluster.shutdown()
        shutil.rmtree(self.temporary, ignore_errors=True)


class FleetLab(Lab):
    """A checkout whose commands run on a cluster."""

    def __init__(self, root: Path, cluster: RayCluster, original: Path | None = None):
        self.cluster = cluster
        super().__init__(root, original=original)

    def start(self, *args: str, **environment):
        """As in Lab; a command that trains does so on the cluster, if not told where."""
        if args[0] in ("try", "noise", "confirm", "sweep") and "--cpus" not in args:
            args += ("--on", "ray", "--cpus", "1")
        return super().start(*args, **self.cluster.variables(**environment))

    def forbid(self, *nodes) -> None:
        """Note these nodes as unlike the session."""
        with open(self.root / ".autoresearch/unlike-nodes.jsonl", "w") as file:
            for node in nodes:
                entry = {"session": self.rows()[0]["id"], "node": node.node_id, "why": "forbidden"}
                file.write(json.dumps(entry) + "\n")


def kill(pid: int) -> None:
    """kill -9; a process that has gone meanwhile is none."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
