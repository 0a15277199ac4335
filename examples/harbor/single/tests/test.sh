#!/bin/bash
# The number of words as this script counts them, and a metric of how far off the answer is.
set -- $TEXT
answer=$(cat count.txt 2> /dev/null)
case $answer in
    '' | *[!0-9]*) answer=-1 ;;
esac
printf '{"reward": %d, "off_by": %d}\n' "$((answer == $#))" "$((answer - $#))" > /logs/verifier/reward.json
