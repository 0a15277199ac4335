"""The fault campaign: breaks a whole service with its engine, agents and consumers at random, and checks the results.

`make campaign ARGS="--runs N --seed S"` runs it. Each run is drawn from one seed: its tasks, and what is broken when.
The service, machines that join it, the engine and one consumer are processes of their own, so that they can be
killed. The campaign uses the service's HTTP API, its database and its processes; nothing in `outrider` depends on the
campaign.
"""
