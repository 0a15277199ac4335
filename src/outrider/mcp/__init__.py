"""The MCP server: tools that let coding agents inspect and operate a service."""
