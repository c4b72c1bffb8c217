"""Workers from one program: `farcall.launch` starts them through an engine, watches, replaces and ends them."""
