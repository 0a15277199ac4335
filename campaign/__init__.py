"""The fault campaign: a whole service with its engine, agents and consumers, broken at random, and what must hold then.

`make campaign ARGS="--runs N --seed S"` runs it. Each run is drawn from one seed: its tasks, and what is broken when.
The service, machines that join it, the engine and one consumer are processes of their own, so that they can be killed.
The folder knows the service by its HTTP API, its database and its processes; nothing of `outrider` knows the campaign.
"""
