#!/bin/bash
# Compares the answer with the number of words. The metric is the difference of the two.
set -- $TEXT
answer=$(cat count.txt 2> /dev/null)
case $answer in
    '' | *[!0-9]*) answer=-1 ;;
esac
printf '{"reward": %d, "off_by": %d}\n' "$((answer == $#))" "$((answer - $#))" > /logs/verifier/reward.json
