"""What providers publish and Headgate reads, such as their prices."""
