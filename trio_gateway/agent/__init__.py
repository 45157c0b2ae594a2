"""The agent: a process beside an engine, which registers it, guards its slots and speaks to gateways."""
