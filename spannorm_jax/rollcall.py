"""Who takes part in a run of several processes, and who has left it: a line of each process to process 0, held while the run lasts.

JAX's own start-up kills a process whose peers do not come, and says little about which. Here every process first reports to process 0,
which answers all of them at once: with the list of those present, or with what is wrong. The lines then stay open. One that breaks, or
is silent for too long, is a process that is gone, and process 0 tells the others. Messages are JSON, one a line; nothing of jax here.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from spannorm_jax.errors import ProcessLost, UserError

LONGEST = 1 << 16  # bytes of one message


class Member(NamedTuple):
    """What a process says of itself."""

    process: int
    host: str
    devices: str = ''  # the accelerators that its launcher lets it see

    def __str__(self) -> str:
        return f'process {self.process} (host {self.host})'


class Line:
    """JSON messages over a socket."""

    def __init__(self, sock: socket.socket, lost_s: float):
        sock.settimeout(lost_s)
        self.sock, self.file, self.lock = sock, sock.makefile('rb'), threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """To an end that is gone nothing is sent; that it is gone shows in `read`."""
        with contextlib.suppress(OSError), self.lock:
            self.sock.sendall(json.dumps(message).encode() + b'\n')

    def read(self) -> dict[str, Any] | None:
        """The next message; None where the other end has closed, has said nothing for `lost_s`, or speaks another language."""
        with contextlib.suppress(OSError, ValueError):
            while text := self.file.readline(LONGEST):
                message = json.loads(text)
                if not isinstance(message, dict):
                    return None
                if message:  # an empty one only says that its sender lives
                    return message
        return None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


class RollCall:
    """One process's end of it. `members` are all processes, in order, and `note` what process 0 told all of them.

    on_end(message, code, grace): called once, in another thread, when the run must end because of another process: it was lost, or has
    left with an error. Where process 0 itself is gone there is no grace: what jax needs went with it, and kills this process at once.

    Raises, from the constructor: UserError, naming the processes that did not come within `start_s`.
    """

    def __init__(
        self,
        me: Member,
        count: int,
        address: str,
        start_s: float,
        lost_s: float,
        on_end: Callable[[str, int, bool], None],
        note: Callable[[list[Member]], dict[str, Any]] = lambda members: {},
    ):
        self.me, self.count, self.address, self.start_s, self.lost_s = me, count, address, start_s, lost_s
        self.on_end, self.ended, self.closing = on_end, False, False
        self.changed = threading.Condition()
        self.lines: dict[int, Line] = {}  # of process 0: to every other one; of any other: to 0
        self.present = {me.process: me}
        self.members: list[Member] = []
        threading.Thread(target=self._beat, daemon=True).start()
        try:
            self.members, self.note = self._call(note) if me.process == 0 else self._answer()
        except BaseException:
            self.close()
            raise
        if me.process:
            threading.Thread(target=self._listen, daemon=True).start()

    def leave(self, message: str, code: int) -> None:
        """Tell the others to end, and why."""
        with self.changed:
            self.ended = True
        self._tell({'end': message, 'code': code})

    def close(self) -> None:
        """Hang up in peace."""
        self.closing = True
        self._tell({'bye': True})
        for line in list(self.lines.values()):
            line.close()
        if hasattr(self, 'server'):
            self.server.close()

    def wait_alone(self, seconds: float) -> None:
        """Process 0: until all others have hung up. It serves what they need to end in order, so it goes last."""
        with self.changed:
            self.changed.wait_for(lambda: not self.lines, seconds)

    def _tell(self, message: dict[str, Any]) -> None:
        for line in list(self.lines.values()):
            line.send(message)

    def _end(self, message: str, code: int, grace: bool = True) -> None:
        with self.changed:
            if self.ended or self.closing:
                return
            self.ended = True
        self.on_end(message, code, grace)

    def _beat(self) -> None:
        while not self.closing:
            self._tell({})
            time.sleep(self.lost_s / 4)

    # process 0

    def _call(self, note) -> tuple[list[Member], dict[str, Any]]:
        port = int(self.address.rpartition(':')[2])
        six = socket.has_dualstack_ipv6()
        try:
            self.server = socket.create_server(
                ('', port), family=socket.AF_INET6 if six else socket.AF_INET, backlog=self.count, dualstack_ipv6=six
            )
        except OSError as e:
            raise UserError(f'process 0 cannot listen on port {port} of host {self.me.host} ({e.strerror}); name another port') from None
        self.wrong = ''
        threading.Thread(target=self._accept, daemon=True).start()
        with self.changed:
            self.changed.wait_for(lambda: self.wrong or len(self.present) == self.count, self.start_s)
            why = self.wrong
            if not why and (missing := [i for i in range(self.count) if i not in self.present]):
                why = (
                    f'{named(missing)} of {self.count} did not come within {self.start_s:g} s; present: '
                    f'{", ".join(str(self.present[i]) for i in sorted(self.present))}. Start one on every host, or see in their output '
                    f'why they ended'
                )
        members, said = [self.present[i] for i in sorted(self.present)], {}
        if not why:
            try:
                said = note(members)
            except UserError as e:
                why = str(e)
        if why:
            self._tell({'end': why, 'code': UserError.exit_code})
            raise UserError(why)
        self._tell({'members': members, 'note': said})
        return members, said

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the server is closed
            while True:
                sock, _ = self.server.accept()
                threading.Thread(target=self._serve, args=(Line(sock, self.lost_s),), daemon=True).start()

    def _serve(self, line: Line) -> None:
        """One other process, from its first word to its last."""
        hello = line.read()
        try:
            member, count = Member(**hello['member']), int(hello['of'])  # pyright: ignore[reportOptionalSubscript]
        except (KeyError, TypeError, ValueError):
            return line.close()  # some other program
        with self.changed:
            if count != self.count:
                self.wrong = f'{member} was told of {count} processes, {self.me} of {self.count}; give every process the same number'
            elif not 0 < member.process < self.count:
                self.wrong = f'{member} is not one of 0 to {self.count - 1}; number the processes from 0'
            elif member.process in self.present:
                self.wrong = f'two processes have the number {member.process}: on {self.present[member.process].host} and {member.host}'
            if not self.wrong:
                self.lines[member.process], self.present[member.process] = line, member
            self.changed.notify_all()
        if self.wrong:
            line.send({'end': self.wrong, 'code': UserError.exit_code})
            return line.close()
        message = line.read()
        if message is None:
            message = {'end': f'{member} is gone: killed, or its host is', 'code': ProcessLost.exit_code}
        with self.changed:
            self.lines.pop(member.process, None)
            if 'end' in message and not self.members:
                self.wrong = message['end']
            self.changed.notify_all()
        line.close()
        if 'end' in message and self.members and not self.closing:
            self._tell(message)
            self._end(message['end'], message['code'])

    # every other process

    def _answer(self) -> tuple[list[Member], dict[str, Any]]:
        host, _, port = self.address.rpartition(':')
        deadline = time.monotonic() + self.start_s
        while True:
            try:
                sock = socket.create_connection((host.strip('[]'), int(port)), timeout=5)
                break
            except OSError as e:
                if time.monotonic() > deadline:
                    why = e.strerror or str(e)
                    raise UserError(
                        f'process 0 did not answer at {self.address} in {self.start_s:g} s ({why}); is it there, and is this its address?'
                    ) from None
                time.sleep(0.2)
        line = self.lines[0] = Line(sock, self.lost_s)
        line.send({'member': self.me._asdict(), 'of': self.count})
        message = line.read()  # when all are there, or at process 0's own deadline
        if message is None:
            raise UserError(f'process 0 at {self.address} ended during the start, or is another program; see its output')
        if 'end' in message:
            raise UserError(message['end'])
        return [Member(*m) for m in message['members']], message['note']

    def _listen(self) -> None:
        message = self.lines[0].read()
        if message is None:
            self._end(f'{self.members[0]} is gone: killed, or its host is', ProcessLost.exit_code, grace=False)
        elif 'end' in message:
            self._end(message['end'], message['code'])


def named(processes: list[int]) -> str:
    """`process 3`, `processes 1, 2, 5`, at most ten of them by number."""
    shown = ', '.join(map(str, processes[:10])) + (f' and {len(processes) - 10} more' if len(processes) > 10 else '')
    return f'process{"es" if len(processes) > 1 else ""} {shown}'
