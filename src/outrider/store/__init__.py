"""The durable state: groups, sessions, turns and results in SQL; images and artifacts in folders."""
