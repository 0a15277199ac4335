#!/bin/bash
set -- $TEXT
echo $# > /app/count.txt
