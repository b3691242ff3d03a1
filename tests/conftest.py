"""For all tests. One thread a process: tiny models gain nothing from more, and several engines fight."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
