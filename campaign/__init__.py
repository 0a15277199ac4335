"""The fault campaign: breaks a whole service with its engine, agents and consumers at random, and checks the results.

`make campaign ARGS="--runs N --seed S"` runs the campaign. The tasks and the faults of a run are drawn from the run's
seed. The service, the machines that join the service, the engine and one consumer are separate processes, so that they
can be killed. The campaign uses the service's HTTP API, database and processes; nothing in `outrider` depends on the
campaign.
"""
