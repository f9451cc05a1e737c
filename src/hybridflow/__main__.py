"""`python -m hybridflow` is the command line."""

import sys

from hybridflow.cli.main import main

sys.exit(main())
