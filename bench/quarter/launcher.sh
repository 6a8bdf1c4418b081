# hvdlaunch on this machine's own driver: bash launcher.sh FACTS. Facts get its JSON, the output its tables.
facts=$1 failures=0
hvdlaunch() { echo "+ hvdlaunch $*"; timeout 30 python -m launch "$@"; }
must() { hvdlaunch "$@" || { failures=$((failures + 1)); echo "hvdlaunch $1: exit status $?"; }; }
train="-- python -m hvdtrain.effnet --data digits --model efficientnet_tiny --epochs 1"
must --version
must topo
must topo --picture topo.svg
must gpus -k 1
must check
must plan -np 1 $train
for command in topo "gpus -k 1" check; do
    printf '\n##### hvdlaunch %s --json\n' "$command" >>"$facts"
    timeout 30 python -m launch $command --json >>"$facts" || failures=$((failures + 1))
done
hvdlaunch run -np 2 $train
[ $? = 2 ] || { failures=$((failures + 1)); echo "2 ranks on one GPU were not refused"; }
echo "$failures failures"
[ $failures = 0 ]
