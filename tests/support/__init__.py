"""What tests of several operations share: problems in hostile memory, references, tolerances, stand-ins of a GPU and clock."""
