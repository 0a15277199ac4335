"""The MCP server: tools with which coding agents read and operate a service."""
