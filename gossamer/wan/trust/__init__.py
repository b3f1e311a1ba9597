"""Who is who: certificates, greetings, and what is asked of every call."""
