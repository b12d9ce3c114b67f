"""`python -m lol` is `lol`."""

import sys

from lol.cli import main

sys.exit(main())
