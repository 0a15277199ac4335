#!/bin/bash
grep -c . /app/ready > /app/answer.txt
