"""`python -m spannorm_jax` and the `spannorm` command. The only place that touches the environment."""

import os
import sys

from spannorm_jax import cli


def main() -> int:
    # XLA reports each start-up detail at INFO and WARNING on stderr, where progress goes; errors still show.
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
    return cli.main(sys.argv[1:])


if __name__ == '__main__':
    sys.exit(main())
