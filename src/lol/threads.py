"""How threads wait, set before torch loads its OpenMP: import this first.

GNU OpenMP's threads spin for long while they wait for each other. With other work on the cores that made training steps
ten times slower, for this program and for its neighbours; spinning briefly and then sleeping costs nothing when the
cores are free (LOG.md, 2026-11-30). A value that is set already is kept.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")
