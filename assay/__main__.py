"""`python -m assay`: the command `assay`, where no script of that name is on the PATH."""

from assay.cli import main

main()
