from torch_mooncake.cli import run

run()
