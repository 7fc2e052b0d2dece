"""What the process of a follower with an emulated GPU runs."""

from mooncake.launch.worker.ranks.follower_program import run
from tests.support.cuda.processes import begin

if __name__ == "__main__":
    begin()
    run()
