"""Sites on the internet: the commands of `gossamer wan`, and a site's way through its run."""
