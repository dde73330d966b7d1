"""Several processes, one run: start-up, waits that name whom they wait for, agreement, and an end for all where one ends.

Process 0 writes and says everything; the others follow. A process that is alone passes through every function here untouched.
"""

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax._src import distributed as runtime
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spannorm_jax.errors import ProcessLost, UserError, say
from spannorm_jax.launch import Place, find_place, introduce, own_devices, refuse_loopback, seconds
from spannorm_jax.rollcall import Member, RollCall, named

T = TypeVar('T')
GRACE_S = 10.0  # for a process that must end to do so in order, before it is ended
STATUS = ('ABORTED:', 'CANCELLED:', 'DEADLINE_EXCEEDED:', 'INTERNAL:', 'UNAVAILABLE:', 'UNKNOWN:')  # XLA's errors begin with one
SEEN_S = 60.0  # for a new file to show on every host: network file systems look only now and then


class Ended(NamedTuple):
    """Why the run must end because of another process."""

    message: str
    code: int


_call: RollCall | None = None  # beside jax's own state of the same kind
_ended: Ended | None = None
_left = False
_places = 0  # that all processes have met at: the same number in each


@contextlib.contextmanager
def together() -> Iterator[None]:
    """While entered this process is one of several, where its environment says so; all leave together, or learn why one did not.

    Raises: UserError (see `find_place`; processes that do not come in time, each named), ProcessLost.
    """
    place = find_place()
    if place is None:
        yield
        return
    start(place)
    try:
        yield
        if not _left:
            gather('the end')
    except Exception as e:
        why = blame(e)
        leave(why)
        if why is e:
            raise
        raise why from e
    except BaseException as e:
        leave(e)
        raise
    finally:
        _stop()


def start(place: Place) -> None:
    """Roll call, then jax.distributed. Nothing may have asked jax for devices before."""
    global _call
    me = introduce(place)
    _call = RollCall(
        me, place.processes, place.address, seconds('SPANNORM_START_S'), seconds('SPANNORM_LOST_S'), _on_end, lambda all: _note(place, all)
    )
    _keep_stdout_clean()
    if jax.config.values['jax_cpu_collectives_implementation'] is None:
        jax.config.update('jax_cpu_collectives_implementation', 'gloo')
    jax.config.update('jax_enable_preemption_service', False)  # it would take SIGTERM for itself
    jax.distributed.initialize(
        f'{place.address.rpartition(":")[0]}:{_call.note["port"]}',
        place.processes,
        place.process,
        own_devices(me, _call.members),
        cluster_detection_method='deactivate',
        initialization_timeout=round(seconds('SPANNORM_START_S')),
        # The roll call's lines are quicker and name who is gone: jax, which can only abort, comes second.
        heartbeat_timeout_seconds=round(2 * seconds('SPANNORM_LOST_S') + 4 * GRACE_S),
        shutdown_timeout_seconds=round(GRACE_S),
    )
    jax.devices()  # the processes exchange what they have: all at once, so that none asks later, alone, and waits for the others


def _keep_stdout_clean() -> None:
    """Results go to stdout; what gloo prints there, from C++, goes to stderr."""
    sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):  # no such streams, as in a notebook
        ours, errors = os.dup(sys.stdout.fileno()), sys.stderr.fileno()
        os.dup2(errors, sys.stdout.fileno())
        sys.stdout = os.fdopen(ours, 'w', buffering=1, encoding=sys.stdout.encoding)


def _note(place: Place, members: list[Member]) -> dict[str, Any]:
    """What process 0 tells all: the port where jax's own service will listen."""
    if len({m.host for m in members}) > 1:
        refuse_loopback(place.address, f'there are several hosts ({", ".join(sorted({m.host for m in members})[:5])})')
    with socket.socket() as probe:
        probe.bind(('', 0))
        return {'port': probe.getsockname()[1]}


def leave(error: BaseException, code: int | None = None) -> None:
    """Tell the others that this process ends with an error, so that they do too; and see that it does end, whatever it then waits for."""
    global _left
    if _call is None or _left:
        return
    _left = True
    code = int(code or getattr(error, 'exit_code', 130 if isinstance(error, KeyboardInterrupt) else 1))
    text = str(error) if isinstance(error, UserError | KeyboardInterrupt) else f'{type(error).__name__}: {error}'
    if _ended is None:
        _call.leave(f'{_call.me} ended: {text}'[:2000], code)
    atexit.register(_exit, code)  # before jax's own, which would wait for the others
    _end_after(GRACE_S * (2 if _call.me.process == 0 else 1), Ended(text, code))


def _on_end(message: str, code: int, grace: bool) -> None:
    global _ended
    again = '; run the same command again to go on' if code == ProcessLost.exit_code else ''
    _ended = Ended(message + again, code)
    if not grace:
        _say_and_exit(_ended)
    _end_after(GRACE_S, _ended)


def _end_after(limit: float, why: Ended) -> None:
    timer = threading.Timer(limit, _say_and_exit, [why])
    timer.daemon = True
    timer.start()


def _say_and_exit(why: Ended) -> None:
    """A process that waits in a collective, in C++, for one that is gone can be ended in no other way."""
    say(f'spannorm: {why.message}')
    os._exit(why.code)


def _exit(code: int) -> None:
    if _call is not None and _call.me.process == 0:
        _call.wait_alone(GRACE_S)  # the others' jax would abort with the service that lives here
    with contextlib.suppress(OSError):  # of a reader that is gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _stop() -> None:
    global _call
    if _call is None or _left:
        return
    jax.distributed.shutdown()
    _call.close()
    _call = None


# Waits


def several() -> bool:
    return runtime.global_state.client is not None and runtime.global_state.num_processes > 1


def first() -> bool:
    """Whether this process is the one that writes and speaks."""
    return not several() or runtime.global_state.process_id == 0


def check() -> None:
    """Raise ProcessLost where the run must end because of another process."""
    if _ended is not None:
        raise ProcessLost(*_ended)


def gather(what: str, value: Any = None, limit: float | None = None) -> list[Any]:
    """Wait until every process is at this place; what each has brought (anything JSON holds), in order of the processes.

    Raises: UserError that names those that did not come within `limit` (SPANNORM_WAIT_S), ProcessLost.
    """
    global _places
    if not several():
        return [value]
    check()
    state, limit = runtime.global_state, limit or seconds('SPANNORM_WAIT_S')
    store: Any = state.client
    place, _places = f'spannorm/{_places}/', _places + 1
    store.key_value_set(f'{place}{state.process_id}', json.dumps([what, value]))
    deadline, pause = time.monotonic() + limit, 0.005
    while len(found := dict(store.key_value_dir_get(place))) < state.num_processes:
        check()
        if time.monotonic() > deadline:
            missing = [i for i in range(state.num_processes) if f'{place}{i}' not in found]
            raise UserError(f'{named(missing)} did not come to {what} within {limit:g} s; see what they do there, and run again')
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
    brought = [json.loads(found[f'{place}{i}']) for i in range(state.num_processes)]
    if len({said for said, _ in brought}) > 1:
        raise UserError(f'the processes do different things: {", ".join(said for said, _ in brought)}; give all of them the same command')
    return [v for _, v in brought]


def any_of(what: str, mine: bool) -> bool:
    """Whether one of the processes says yes; all wait for the answer."""
    return any(gather(what, mine)) if several() else mine


def from_first(what: str, make: Callable[[], Any]) -> Any:
    """What `make` gives in process 0, as JSON holds it; only there it is called."""
    if not several():
        return make()
    return gather(what, make() if first() else None)[0]


def prepared_by_first(what: str, make: Callable[[], T]) -> T:
    """What `make` gives in this process, which calls it once process 0 is done with it: what that has stored need not be made again."""
    if not several():
        return make()
    made = make() if first() else None
    gather(what, limit=seconds('SPANNORM_DATA_S'))
    return make() if made is None else made


def same(what: str, value: dict[str, Any], mend: str) -> None:
    """Raise UserError, in every process, where one has other values than process 0; names the first and its first fields."""
    if not several():
        return
    all = gather(what, value)
    for i, other in enumerate(all):
        if differ := [k for k in all[0] if other.get(k) != all[0][k]]:
            shown = ', '.join(f'{k}: {all[0][k]!r} and {other.get(k)!r}' for k in differ[:3])
            raise UserError(f'{what} of processes 0 and {i} differ ({shown}); {mend}')


def check_shared(folder: Path) -> None:
    """Raise UserError where a process does not see what process 0 writes in a folder."""
    if not several():
        return
    name = from_first('the storage', lambda: f'.shared-{uuid.uuid4().hex}')
    if first():
        (folder / name).touch()
    gather('the storage')
    deadline = time.monotonic() + SEEN_S
    while not (seen := (folder / name).exists()) and time.monotonic() < deadline:
        time.sleep(0.5)
        os.listdir(folder)  # has a network file system look again
    blind = [i for i, sees in enumerate(gather('the storage', seen)) if not sees]
    if first():
        (folder / name).unlink()
    if blind:
        raise UserError(f'{named(blind)} cannot see {str(folder)!r} of process 0; put run.root on storage that all hosts share')


def check_mesh(mesh: Mesh) -> None:
    """Raise UserError where a process has no device in the mesh: it could not take part."""
    idle = set(range(jax.process_count())) - {d.process_index for d in mesh.devices.flat}
    if idle:
        raise UserError(f'the mesh has no device of {named(sorted(idle))}; leave out mesh.devices, or start fewer processes')


class Agreement:
    """Called with this process's yes or no: whether some process has said yes, by the same call in all of them, and then for good.

    Every process must call it equally often. A call launches a sum over one number per device, behind the step under way, and looks at
    that of the call before, which is done by then; so nothing waits, and a signal is heeded one step later than in a process alone.
    """

    def __init__(self, mesh: Mesh):
        self.size, self.yes, self.before = mesh.size, False, None
        self.each = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self.total = jax.jit(lambda flags: flags.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))
        self(False)  # compiled before the first step

    def __call__(self, mine: bool) -> bool:
        if not several():
            return mine
        flag = lambda index: np.full(len(range(self.size)[index[0]]), mine, np.int32)  # noqa: E731
        before, self.before = self.before, self.total(jax.make_array_from_callback((self.size,), self.each, flag))
        self.yes = self.yes or (before is not None and int(before) > 0)
        return self.yes


def blame(error: Exception) -> Exception:
    """The error of a process that was lost, where that is why a collective failed here; it can take a moment until it is known.

    What this process did wrong by itself stays its own, whoever else has ended by then.
    """
    if isinstance(error, UserError) or not several() or not _of_collective(error):
        return error
    deadline = time.monotonic() + seconds('SPANNORM_LOST_S') + 1
    while _ended is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if _ended is None:
        return error
    lost = ProcessLost(*_ended)
    lost.__cause__ = error
    return lost


def _of_collective(error: BaseException | None) -> bool:
    """Whether it comes from XLA, and not for want of memory: as JaxRuntimeError from what runs, as ValueError from a launch, or wrapped."""
    if error is None:
        return False
    if str(error).startswith(STATUS) or (isinstance(error, jax.errors.JaxRuntimeError) and 'RESOURCE_EXHAUSTED' not in str(error)):
        return True
    return _of_collective(error.__cause__ or (None if error.__suppress_context__ else error.__context__))
