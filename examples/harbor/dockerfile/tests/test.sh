#!/bin/sh
wanted="line 1: hello there
line 2: hello there
line 3: hello there
ALPHA
BETA"
[ "$(cat log.txt)" = "$wanted" ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
