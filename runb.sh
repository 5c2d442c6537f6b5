cd /tmp/scratch-me
timeout 200 torchrun --nproc-per-node 2 --master-port 29877 bench.py "$@" 2>&1 | grep -v -i warn | tail -30
