"""`python -m spannorm_jax` and the `spannorm` command. Its environment is set here, but for xla_flags."""

import contextlib
import io
import os
import sys
from pathlib import Path

HUGE_PAGES = 'glibc.malloc.hugetlb=1'
AGAIN = 'spannorm_again'  # as -X: tells the second start


def main() -> int:
    ours = Path(sys.argv[0]).name == 'spannorm' or sys.argv[0] == __file__  # and not a program of someone else's that calls this
    if ours and '--help' not in sys.argv:  # which answers at once
        huge_pages()
    from spannorm_jax import cli  # after it: what is imported before is imported twice

    # XLA reports each start-up detail at INFO and WARNING on stderr, where progress goes; errors still show.
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
    # What the terminal's encoding does not have, and bytes of a file's name that are no text, show as an escape and end nothing.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors='backslashreplace')
    return cli.main(sys.argv[1:])


def huge_pages() -> None:
    """Starts this process again, once, with memory in huge pages where the system gives them to those who ask.

    A step on the CPU takes its temporaries anew from the system, which maps and clears them page by page: 15 to 20% of a small model's step
    (docs/performance.md). The C library reads the setting before Python runs; one that is set already stays, and so does a debugger.
    """
    if sys.platform == 'linux' and 'GLIBC_TUNABLES' not in os.environ and AGAIN not in sys._xoptions and sys.gettrace() is None:
        environment = {**os.environ, 'GLIBC_TUNABLES': HUGE_PAGES}
        with contextlib.suppress(OSError):  # it is about speed alone
            os.execve(sys.executable, [sys.executable, '-X', AGAIN, *sys.orig_argv[1:]], environment)


if __name__ == '__main__':
    sys.exit(main())
