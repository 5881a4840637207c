from flatfed.cli import main

main()
