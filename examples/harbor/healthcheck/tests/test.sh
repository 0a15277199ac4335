#!/bin/bash
[ "$(cat answer.txt 2> /dev/null)" = 3 ] && [ "$(grep -c . ready)" = 3 ] && echo 1 > /logs/verifier/reward.txt ||
    echo 0 > /logs/verifier/reward.txt
