"""What looks at pools, recorded or alive: imported when it is used."""
