"""The parts of a cut row, through the workspace, into one."""
