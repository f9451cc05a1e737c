"""Where work runs: in this process, or in Ray actors. The page does not know which."""
