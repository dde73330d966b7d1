"""What the environment says of the processes of a run: which one this is, how long to wait for the others, what of the host is its own.

JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID   host:port of process 0, how many there are, which one this is (0 ...)
SPANNORM_START_S   300     wait for all processes to come
SPANNORM_LOST_S    60      silence after which a process counts as lost
SPANNORM_WAIT_S    3600    wait for the others at a place that all must reach, such as the first step
SPANNORM_DATA_S    86400   wait for process 0 to prepare the data
"""

import os
import re
import socket
import warnings
from typing import NamedTuple

from jax._src import clusters

from spannorm_jax.errors import UserError
from spannorm_jax.rollcall import Member

START = ('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')
SECONDS = {'SPANNORM_START_S': 300.0, 'SPANNORM_LOST_S': 60.0, 'SPANNORM_WAIT_S': 3600.0, 'SPANNORM_DATA_S': 86400.0}


class Place(NamedTuple):
    """Where a process stands among the others; `hosts` as far as the launcher says how many there are."""

    address: str
    processes: int
    process: int
    hosts: int | None = None


def seconds(name: str) -> float:
    """One of the limits above. Raises UserError for what is not a positive number."""
    text = os.environ.get(name, '')
    try:
        value = float(text) if text else SECONDS[name]
    except ValueError:
        value = 0.0
    if not value > 0:
        raise UserError(f'{name} = {text!r}: expected seconds, a number above 0')
    return value


def find_place() -> Place | None:
    """This process's place: from the three variables, else from what JAX recognises (TPU pod, GKE, SLURM, Open MPI); None alone.

    Raises: UserError for variables that are incomplete, not numbers, or name a loopback address though there are several hosts.
    """
    given = {name: os.environ[name] for name in START if os.environ.get(name)}
    numbers = {}
    for name in START[1:]:
        if name in given:
            if not given[name].isdecimal():
                raise UserError(f'{name} = {given[name]!r}: expected a whole number')
            numbers[name] = int(given[name])
    if numbers.get('JAX_NUM_PROCESSES') == 1:
        return None
    if len(given) < len(START):
        address, count, process = _detect(given.get(START[0]), numbers.get(START[1]), numbers.get(START[2]))
        if (count is None or process is None or address is None) and given:
            raise UserError(
                f'{", ".join(given)} is set, but not {", ".join(n for n in START if n not in given)}, and no launcher that JAX knows was '
                f'found to take it from; set all of them on every process'
            )
    else:
        address, count, process = given[START[0]], numbers[START[1]], numbers[START[2]]
    if address is None or count is None or process is None or count == 1:
        return None
    if not 0 <= process < count:
        raise UserError(f'JAX_PROCESS_ID = {process} is not one of 0 to {count - 1} (JAX_NUM_PROCESSES = {count})')
    host, _, port = address.rpartition(':')
    if not host or not port.isdecimal():
        raise UserError(f'JAX_COORDINATOR_ADDRESS = {address!r}: expected HOST:PORT, of process 0')
    place = Place(address, count, process, _hosts())
    if place.hosts is not None and place.hosts > 1:
        refuse_loopback(address, f'the launcher says that there are {place.hosts} hosts')
    return place


def _detect(address: str | None, count: int | None, process: int | None) -> tuple[str | None, int | None, int | None]:
    if 'KUBERNETES_SERVICE_HOST' in os.environ and 'JOB_COMPLETION_INDEX' not in os.environ:
        # A pod that is no part of an indexed job: JAX would fail on it.
        kinds = [kind for kind in clusters.ClusterEnv._cluster_types if kind.__name__ != 'K8sCluster']
    else:
        kinds = clusters.ClusterEnv._cluster_types
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # in a pod without the package kubernetes, which then sets the variables
        kind = next((k for k in kinds if not k.opt_in_only_method and k.is_env_present()), None)
    if kind is None:
        return address, count, process
    count = kind.get_process_count() if count is None else count
    if count == 1:
        return address, count, 0
    if address is None:
        address = kind.get_coordinator_address(round(seconds('SPANNORM_START_S')), os.environ.get('JAX_COORDINATOR_PORT'))
    return address, count, kind.get_process_id() if process is None else process


def _hosts() -> int | None:
    """How many hosts the launcher says there are."""
    if text := os.environ.get('SLURM_STEP_NUM_NODES'):
        return int(text)
    if 'OMPI_COMM_WORLD_SIZE' in os.environ:
        return 2 if os.environ['OMPI_COMM_WORLD_SIZE'] != os.environ.get('OMPI_COMM_WORLD_LOCAL_SIZE') else 1
    if text := os.environ.get('TPU_WORKER_HOSTNAMES'):
        return len(set(text.split(',')))
    return None


def refuse_loopback(address: str, why: str) -> None:
    """Raise UserError where the address of process 0 reaches its own host alone."""
    host = address.rpartition(':')[0].strip('[]').lower()
    if host in ('localhost', '::1') or host.startswith('127.'):
        raise UserError(f'the coordinator is {address}, which each host takes for itself, but {why}; name the host of process 0')


def introduce(place: Place) -> Member:
    """What this process says of itself at the roll call."""
    return Member(place.process, socket.gethostname(), os.environ.get('CUDA_VISIBLE_DEVICES', ''))


def own_devices(me: Member, members: list[Member]) -> list[int] | None:
    """The accelerators of this host that this process takes; None for all that it sees, which is what one process a host wants.

    Several processes that see the same ones take one each, as JAX has it under every launcher it knows; one that sees a single one, which
    its launcher may have renumbered, takes that.
    """
    if re.fullmatch(r'[^,]+', me.devices):
        return None
    beside = [m for m in members if (m.host, m.devices) == (me.host, me.devices)]
    return None if len(beside) == 1 or os.environ.get('JAX_LOCAL_DEVICE_IDS') else [beside.index(me)]
