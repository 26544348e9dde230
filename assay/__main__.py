"""`python -m assay`: the installed command `assay`, where no script of that name is on the PATH."""

from importlib.metadata import entry_points

command = next(iter(entry_points(group="console_scripts", name="assay")))
command.load()()
