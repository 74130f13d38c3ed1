"""From a configuration to processes. Imports no torch until a worker starts."""
