from equicam_paper.cli import app

app(prog_name="equicam-paper")
