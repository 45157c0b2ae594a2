"""Engines that an agent can stand beside; see `trio_gateway.agent._engine` for the port."""
