"""One call each: decode, append and merge, as functions and as torch ops, with the plans and workspaces behind them."""
