#!/bin/bash
# This is the agent's own sandbox, with its files and processes of both steps.
reward=0
if [ "$(cat /app/report.txt)" = "8 with the shell" ] && kill -0 "$(cat /app/running)"; then
    reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
