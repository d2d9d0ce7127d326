from equicam.cli.app import app

app(prog_name="equicam")
