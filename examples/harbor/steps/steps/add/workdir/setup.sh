printf '10\n20\n' > more.txt
