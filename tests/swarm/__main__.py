"""``python3 dev.py simulate``."""

import sys

from swarm.command import main

sys.exit(main())
