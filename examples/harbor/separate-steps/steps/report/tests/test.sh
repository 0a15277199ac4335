#!/bin/bash
# The agent's own sandbox: what it has written and started in both steps is here.
reward=0
if [ "$(cat /app/report.txt)" = "8 with the shell" ] && kill -0 "$(cat /app/running)"; then
    reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
