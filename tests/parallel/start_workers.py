"""What `dp train --workers N` does: start_workers.py N command…"""

import sys

from allforce.distributed.spawn import run_local_workers

if __name__ == "__main__":
    sys.exit(run_local_workers(sys.argv[1], sys.argv[2:]))
