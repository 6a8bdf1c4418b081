from launch.start.sbatch import sbatch


def test_a_name_with_a_line_end_begins_no_line_of_the_script():
    script = sbatch(["true"], name="a\nrm -rf x", folder="/a\nb", np=1, nodes=(), gpus=False, grace_s=25)
    assert script.splitlines()[1] == "#SBATCH --job-name=a_rm_-rf_x"
    assert "cd '/a\nb' || exit 2\n" in script
    assert script.endswith('\nexport HVDLAUNCH_JOB="${HVDLAUNCH_JOB:-a_rm_-rf_x-$SLURM_JOB_ID}"\nexec true\n')
