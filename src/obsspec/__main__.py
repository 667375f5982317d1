"""``python -m obsspec``, which launchers such as accelerate's need."""

from obsspec.cli import main

main()
