"""`python -m spannorm_jax` and the `spannorm` command. The only place that touches the environment."""

import io
import os
import sys

HUGE_PAGES = 'glibc.malloc.hugetlb=1'


def main() -> int:
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
    (docs/performance.md). The C library reads the setting before Python runs; one that is set already stays.
    """
    if sys.platform == 'linux' and 'GLIBC_TUNABLES' not in os.environ:
        os.environ['GLIBC_TUNABLES'] = HUGE_PAGES
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == '__main__':
    sys.exit(main())
